"""The forms of a report; nothing here measures.

summary    from figures to a report             contents   sentences and tables that forms share
text       for a terminal and a notebook        markdown   for a pull request
page       one HTML file                        charts     its pictures, by matplotlib
saved      JSON, and back; Chrome's trace       against    two reports compared
"""
