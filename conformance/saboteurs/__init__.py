"""Backends that are broken on purpose: each must be caught by exactly the checks it names.

A saboteur is a few lines over the ``host`` backend, or over the core where the
core is what keeps a promise.  ``campaign`` runs them; a check without a saboteur
would be a check that nobody has ever seen fail.
"""
