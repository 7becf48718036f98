import sys

from hybrid.perf.gate import main

if __name__ == "__main__":
    sys.exit(main())
