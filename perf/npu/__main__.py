import sys

from perf.npu import main

sys.exit(main())
