import sys

from perf.gate import main

sys.exit(main())
