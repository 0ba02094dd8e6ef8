"""The page's style, light or dark as the reader's system is; colours of states and marks differ in lightness too."""

STYLE = """
:root{--ink:#1c2430;--soft:#5b6675;--line:#dfe4ea;--back:#fff;--card:#f6f8fa;--main:#2563a8;
--verified:#2e7d4f;--written:#5aa876;--dumped:#8fc7e8;--sent:#4a90c4;--pending:#c9d1da;--failed:#c0392b;--skipped:#8d7a5c;
--stall:#c0392b;--death:#7b1fa2;--pause:#d98e04;--failure:#e0563f;--recovery:#2e7d4f;--start:#5b6675}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaef;--soft:#9aa7b5;--line:#2d3743;--back:#12171d;--card:#1a212a;--main:#6aa9e9;
--pending:#3b4652;--skipped:#a8926e;
--verified:#3f9d68;--failed:#e0604f;--stall:#e0604f;--death:#b978dd;--recovery:#4cb37a;--start:#9aa7b5}}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:20px;margin:0;overflow-wrap:anywhere}h2{font-size:16px;margin:32px 0 10px;border-bottom:1px solid var(--line);padding-bottom:4px}
.lead{font-size:18px;margin:6px 0 0}header p{margin:2px 0;color:var(--soft)}header .lead{color:var(--ink)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin-top:14px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 14px}
.tiles b{display:block;font-size:18px;font-variant-numeric:tabular-nums}.tiles span{color:var(--soft);font-size:13px}
svg{display:block;width:100%;height:auto}figure{margin:0}figcaption{color:var(--soft);font-size:13px;margin-top:4px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:24px}@media (max-width:700px){.pair{grid-template-columns:1fr}}
table{border-collapse:collapse;width:100%;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
th{color:var(--soft);font-weight:500;font-size:13px}td svg{width:640px;max-width:100%}code{font-size:13px}
.when{white-space:nowrap}
.axis{fill:var(--soft);font-size:11px}.grid{stroke:var(--line);stroke-width:1}
.area{fill:var(--main);fill-opacity:.25;stroke:var(--main);stroke-width:1.2}.bar,.cell{fill:var(--main)}
.mark{stroke:var(--back);stroke-width:1.5}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
""" + "".join(
    f".{name}{{fill:var(--{name})}}.key.{name}{{background:var(--{name})}}"
    for name in (
        "verified", "written", "dumped", "sent", "pending", "failed", "skipped",
        "stall", "death", "pause", "failure", "recovery", "start",
    )
)  # fmt: skip
STYLE += "footer{margin-top:40px;color:var(--soft);font-size:13px}"
