"""The sandbox as the environment or the code interpreter of other libraries, one module per library.

A module imports its library; the rest of the package imports none of these modules. `docs/integrations.md` describes
them.
"""
