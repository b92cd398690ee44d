"""The pages of the reproduction, made from the records: README.md, and Markdown, CSV and pictures in records/."""
