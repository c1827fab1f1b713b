"""Time and memory of an optimizer's step, compared in pairs with torch's fused AdamW.

:mod:`cases` are the parameters that are updated, :mod:`optimizers` update them, :mod:`timing` is
how a step is timed, :mod:`steps` measures the optimizers, and :mod:`results` shows that.
:mod:`training` times whole training steps of a recipe, and alone needs the laboratory.
"""
