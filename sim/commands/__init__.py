"""The commands of ``farflow sim``: they parse and print, ``sim`` holds what they do."""
