"""A script that trains nothing, for looking at its screen; and the screen of a terminal after control codes."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def shown(output: str) -> list[str]:
    """What a terminal shows: cursor movements, erased lines and overwritten text carried out."""
    lines, row, column = [""], 0, 0
    for match in CODE.finditer(output):
        number, code, control, text = match.groups()
        if control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text:
            old = lines[row].ljust(column)
            lines[row] = old[:column] + text + old[column + len(text) :]
            column += len(text)
        elif code == "A":
            row -= int(number or 1)
        elif code == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif code not in ("m", "h", "l"):
            raise AssertionError(f"unknown control code {match.group()!r}")
    return [line.rstrip() for line in lines]


def on_a_terminal(*arguments: str, columns: int = 120) -> tuple[int, str]:
    """Run this script on a terminal of its own; its exit status and all that it wrote there."""
    mine, its = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.logs.screen", *arguments], stdout=its, stderr=its, stdin=its, env=env, cwd=ROOT
    )
    os.close(its)
    output = b""
    try:
        while select.select([mine], [], [], 60)[0] and (piece := os.read(mine, 65536)):
            output += piece
    except OSError:  # Linux says so when the last process has closed the terminal
        pass
    os.close(mine)
    try:
        return process.wait(10), output.decode()
    finally:
        process.kill()


def main(run_dir: str, how: str) -> None:
    """Log as a Trainer would. ``how``: tee (as under distkit-run), plain, raise, fork."""
    from distkit.config import load_config
    from distkit.launch.output import redirect
    from distkit.logs import RunLog

    if how == "tee":
        output = redirect(Path(run_dir), 0, show=False, header="start")
    log = RunLog(load_config().config, Path(run_dir), is_main=True)
    log.start(20, 0)
    log.say("starting")
    for step in range(1, 21):
        log.advance(step)
        if step % 10 == 0:
            log.point(step, {"epoch": 0, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "samples_per_s": 1000.0})
            log.log({"eval/loss": 1.5}, step)
        if step % 5 == 0:
            print("half a ", end="", flush=True)
            log.advance(step)
            print(f"line at step {step}")
            sys.stderr.write(f"\x1b[31mwarning\x1b[0m [at] step {step}\n")
            sys.stderr.write(f"\r 10%\r 50%\r100% of another bar {step}\r\n")
    if how == "raise":
        raise RuntimeError("boom")
    if how == "fork":
        pid = os.fork()
        if pid == 0:
            print("hello from a child", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    log.close()
    print("after the end")
    if how == "tee":
        output.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
