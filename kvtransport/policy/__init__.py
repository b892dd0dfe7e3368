"""Policies: what to retain, and whether to pull or to compute.

``retention`` and ``recompute`` hold the interfaces and the simple policies;
``load_retention`` and ``load_recompute`` there make one from its configured name.
"""
