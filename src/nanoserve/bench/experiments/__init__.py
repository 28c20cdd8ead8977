"""One file per question: each opens with it and measures its arms. `findings` concludes."""
