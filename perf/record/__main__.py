import sys

from hybrid.perf.record.taking import main

if __name__ == "__main__":
    sys.exit(main())
