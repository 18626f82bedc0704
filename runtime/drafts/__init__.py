"""Drafts: tokens guessed ahead, so that one step can check several of them. What the model says decides, as ever."""
