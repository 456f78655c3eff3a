"""The command line `isobatch`. This module stays light, so that `--version` and help are quick."""

import contextlib
import errno
import io
import os
import sys

# What writing fails with where a disk is full or broken.
_NOT_TAKEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_EXIT_FAILURE = 1


def main() -> None:
    """Run the command line and exit with one of the codes in `scheduler_service.cli.failures`."""
    _open_standard_streams()
    # gRPC's own log lines, such as a server's goodbye, would land amid an answer.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from scheduler_service.cli.app import cli

    try:
        sys.exit(cli.main(prog_name="isobatch", standalone_mode=True))
    except OSError as error:
        if error.errno not in _NOT_TAKEN:
            raise
        with contextlib.suppress(OSError):
            words = f"[output] what is printed must be written, got {error.strerror}"
            print(f"isobatch: {words}", file=sys.stderr)
        _discard_rest()
        sys.exit(_EXIT_FAILURE)


def _open_standard_streams() -> None:
    """Make the standard streams take whatever is written to them.

    Those that whoever started this program has closed are opened on nothing. Else the next file or
    connection would get the number of one, and take what is written to it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            _point_at_nothing(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  # for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write what the terminal's character set does not have.
        sys.stdout.reconfigure(errors="replace")


def _discard_rest() -> None:
    """Let what is still buffered go nowhere, so that the end of the program does not fail of it."""
    for number in (1, 2):
        _point_at_nothing(number)


def _point_at_nothing(number: int) -> None:
    descriptor = os.open(os.devnull, os.O_RDWR)
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
