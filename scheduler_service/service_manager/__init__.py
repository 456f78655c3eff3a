"""Both services under the system's own supervision: launchd on a Mac, systemd on Linux.

`spec` says what is to run; `launchd` and `systemd` write it down in their own words and drive
their tools; `runner` stands between launchd and a service. Standard library only.
"""
