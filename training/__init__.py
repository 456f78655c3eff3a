"""Makes the draft model: a recipe that needs torch and a GPU, and is no part of the product."""
