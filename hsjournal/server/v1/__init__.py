"""Protocol v1: a patched server that writes ``req_N/`` with ``.pt`` files and knows no request ids.

A gateway of ours stands before it and speaks protocol v2 to the worker, so that all rules of v1 lie here: only requests
of distinct token counts are at the server at a time, a count is barred after a time-out until the server has drained or
was started anew, and what is ambiguous or older than the request is refused. Rows, layers' number, width and dtype are
checked; that the rows are those of the token ids sent can't be proven, and every dump says so.
"""
