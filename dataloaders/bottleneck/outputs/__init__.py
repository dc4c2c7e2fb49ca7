"""What a report is written as, a file each; none of them measures.

contents   what all of them say       saved      JSON, and back; Chrome's trace events
markdown   for a pull request         against    two reports compared
page       one HTML file              charts     its pictures, by matplotlib
"""
