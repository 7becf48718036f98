import sys

from hybrid.perf.tune import main

sys.exit(main())
