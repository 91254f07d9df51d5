"""What a run leaves for people and programs to read: its folder, the screen, metrics.jsonl, trackers."""

from distkit.logs.logger import RunLog
from distkit.logs.run_folder import choose_run_dir, create_run_folder

__all__ = ["RunLog", "choose_run_dir", "create_run_folder"]
