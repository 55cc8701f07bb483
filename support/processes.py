"""What a command asks of the machine it runs on."""

import os
import shutil
import sys

from configurator import ConfigError


def check_compiler():
    """Raises ConfigError where torch.compile would find no C++ compiler."""
    compiler = os.environ.get('CXX', 'clang++' if sys.platform == 'darwin' else 'g++')
    if shutil.which(compiler) is None:
        raise ConfigError(f'compile=True needs a C++ compiler, and there is no {compiler}; install it, or --compile=False.')
