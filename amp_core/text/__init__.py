"""Text for people: numbers with units (`formatting`), the glossary, HTML, CSV that a spreadsheet may open.

Pages, reports, notebooks and the command line format every number here, so that one value reads alike everywhere.
"""
