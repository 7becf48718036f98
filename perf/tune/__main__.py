import sys

from perf.tune import main

sys.exit(main())
