"""Programs a person starts. They import `bloomery.runtime` and nothing of the workers."""
