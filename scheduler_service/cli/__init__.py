"""The command line `isobatch`. This module stays light, so that `--version` and help are quick."""

import os
import sys


def main() -> None:
    """Run the command line and exit with one of the codes in `scheduler_service.cli.failures`."""
    # gRPC's own log lines, such as a server's goodbye, would land amid an answer.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from scheduler_service.cli.app import cli

    sys.exit(cli.main(prog_name="isobatch", standalone_mode=True))
