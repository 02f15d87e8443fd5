"""The jobs behind the commands: load, one pure computation, one result object.

Results are dataclasses whose ``to_dict()`` is the JSON that the command prints.
"""
