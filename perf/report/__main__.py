import sys

from hybrid.perf.report import main

sys.exit(main())
