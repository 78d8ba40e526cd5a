"""`python -m servebook.cli`: the command."""

import sys

from .command import main

sys.exit(main())
