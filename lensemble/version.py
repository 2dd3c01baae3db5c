"""The release this code belongs to; daemons and the command show it to each other."""

VERSION = "0.1.0"
BUILD = f"lensemble {VERSION}"
