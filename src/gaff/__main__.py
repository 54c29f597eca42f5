"""``python -m gaff`` is the command line."""

import sys

from gaff.cli import main

sys.exit(main())
