"""The parts a decoder is made of.

None of them knows how many ranks there are: anything exchanged between ranks goes through the
``Strategy`` that each part is given.
"""
