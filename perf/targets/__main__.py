import sys

from hybrid.perf.targets import main

sys.exit(main())
