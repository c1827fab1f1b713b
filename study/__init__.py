"""The study: ten questions and the runs that answer them.

``questions`` defines the runs, and ``run`` trains and evaluates them.
"""
