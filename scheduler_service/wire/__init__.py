"""Messages to values and back: `executor` for the executor's contract, `api` for the public one.

Generated messages stop here, in the servicer and in the executor client.
"""
