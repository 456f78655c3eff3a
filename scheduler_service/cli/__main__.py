"""`python -m scheduler_service.cli`."""

from scheduler_service.cli import main

main()
