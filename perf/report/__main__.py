import sys

from hybrid.perf.report import main

if __name__ == "__main__":
    sys.exit(main())
