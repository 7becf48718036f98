import sys

from perf.profile import main

sys.exit(main())
