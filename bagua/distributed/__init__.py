"""`python -m bagua.distributed.launch`, see launch.py."""
