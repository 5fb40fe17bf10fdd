"""What runs inside the jail. Hostile ground: nothing here is imported by the rest, which meets it only as bytes.

The files are run by path, by whichever Python (3.9 or later) is the guest, and import only the standard library.
"""
