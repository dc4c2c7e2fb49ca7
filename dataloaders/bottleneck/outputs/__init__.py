"""What a report is written as, a file each; none of them measures.

words      the verdict in sentences, figures as text     tables     the report's tables, as text
saved      JSON, and the report back from it             trace      Chrome's trace events
markdown   a summary for a pull request                  against    two reports compared
page       one HTML file, from page.html                 charts     its pictures, by matplotlib
"""
