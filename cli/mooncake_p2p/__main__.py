"""`python -m mooncake_p2p`."""

from mooncake_p2p.main import main

if __name__ == "__main__":
    main()
