"""Make a report and write it in several forms; nothing here measures.

summary    makes a report of the figures        contents   sentences and tables that all forms share
text       for a terminal and a notebook        markdown   for a pull request
page       one HTML file                        charts     the charts of that page
saved      JSON, read back too; Chrome's trace  against    compares two reports
"""
