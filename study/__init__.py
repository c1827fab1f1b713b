"""The study: ten questions, answered by runs. ``questions`` says what is run, ``run`` runs it."""
