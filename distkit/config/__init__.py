"""Settings: the schema, where each value comes from, and what can't go together."""

from distkit.config.load import LoadedConfig, load_config
from distkit.config.schema import Config

__all__ = ["Config", "LoadedConfig", "load_config"]
