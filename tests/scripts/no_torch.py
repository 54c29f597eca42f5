import sys

print("torch" in sys.modules, "gaff" in sys.modules, sys.argv)
sys.exit(3)
