import sys

from hybrid.generate import main

if __name__ == "__main__":
    sys.exit(main())
