"""Packages that only some commands need."""

import importlib

from configurator import ConfigError


def import_optional(name, install='-r requirements-data.txt'):
    """The module `name` of an optional package; ConfigError when it is not installed, with what pip should install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f'this needs the package {name.split(".")[0]}; run `pip install {install}`.') from None
