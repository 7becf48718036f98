import sys

from hybrid.perf.gate import main

sys.exit(main())
