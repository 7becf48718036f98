import sys

from hybrid.serve import main

if __name__ == "__main__":
    sys.exit(main())
