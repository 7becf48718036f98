import sys

from hybrid.perf.npu import main

sys.exit(main())
