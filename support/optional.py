"""Packages that only some commands need."""

import importlib

from configurator import ConfigError


def import_optional(name):
    """The module `name` of an optional package; ConfigError when the package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split('.')[0]
        raise ConfigError(f'this needs the package {package}; run `pip install -r requirements-data.txt`.') from None
