"""What a result is written as; nothing here measures.

summary    figures into a report's words    contents   what all forms say
text       for a terminal                   markdown   for a pull request
page       one HTML file                    charts     its pictures, by matplotlib
saved      JSON, and back; Chrome's trace   against    two reports compared
"""
