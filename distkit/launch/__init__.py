"""`distkit-run`: options and config become a plan, the plan is executed, failures are reported.

:mod:`~distkit.launch.command` reads the command line, :mod:`~distkit.launch.plan` turns it into a ``LaunchPlan``,
:mod:`~distkit.launch.agent` runs on each host and looks after the workers, and :mod:`~distkit.launch.worker` is what
each process runs before the user's script.
"""
