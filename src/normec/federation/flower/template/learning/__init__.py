"""A federation: the learning task (`task`), and the apps of the server (`server`) and the parties (`client`)."""
